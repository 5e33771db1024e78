"""lm-eval's local-completions: log-likelihoods of choices, and generated texts, of a task in the folder given."""

import json
import sys

import lm_eval
from lm_eval.tasks import TaskManager

url, tokenizer, folder = sys.argv[1:]
arguments = {
    "model": "tiny", "base_url": f"{url}/completions", "tokenizer": tokenizer, "num_concurrent": 2, "max_length": 512,
    "max_retries": 1,
}  # fmt: skip
found = lm_eval.simple_evaluate(
    model="local-completions",
    model_args=arguments,
    tasks=["choosing", "writing"],
    task_manager=TaskManager(include_path=folder, include_defaults=False),
    bootstrap_iters=0,
)
samples = found["samples"]
for task in samples:
    samples[task].sort(key=lambda sample: sample["doc_id"])
print(
    json.dumps(
        {
            "choosing": [[resp for (resp,) in sample["resps"]] for sample in samples["choosing"]],
            "writing": [sample["resps"][0][0] for sample in samples["writing"]],
            "accuracy": found["results"]["choosing"]["acc,none"],
        }
    )
)
