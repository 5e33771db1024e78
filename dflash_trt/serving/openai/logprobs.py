"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from dflash_trt.serving.openai.model import Model
from dflash_trt.serving.wire import Update


def of_chat(model: Model, update: Update) -> dict[str, Any] | None:
    """`logprobs` of a chat's choice: one entry per token of this update."""
    if update.get("logprobs") is None:
        return None
    tops = update.get("top_logprobs") or [[]] * len(update["logprobs"])
    content = []
    for token, logprob, top in zip(update["token_ids"], update["logprobs"], tops, strict=True):
        entry = _entry(model, token, logprob)
        content.append(entry | {"top_logprobs": [_entry(model, *pair) for pair in top]})
    return {"content": content, "refusal": None}


def _entry(model: Model, token: int, logprob: float) -> dict[str, Any]:
    text = model.token_text(token)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(model.token_bytes(token))}


def of_completion(model: Model, prompt: list[int], update: Update, offset: int) -> dict[str, Any]:
    """`logprobs` of a completion's choice: of an update's tokens, and before them of the prompt's that it is about.

    prompt: the prompt's tokens that belong to its `prompt_logprobs`. offset: characters of the text before all these.
    """
    ids, logprobs = update["token_ids"], list[float | None](update.get("logprobs") or [])
    tops: list[Any] = update.get("top_logprobs") or [None] * len(logprobs)
    if prompt:
        ids, logprobs = [*prompt, *ids], [*update["prompt_logprobs"], *logprobs]
        tops = [*(update.get("prompt_top_logprobs") or [[]] * len(prompt)), *tops]
    texts = [model.token_text(token) for token in ids]
    return {
        "tokens": texts,
        "token_logprobs": [None if value is None else _finite(value) for value in logprobs],
        "top_logprobs": [
            None
            if top is None or own is None
            else {model.token_text(token): _finite(value) for token, value in top}
            for top, own in zip(tops, logprobs, strict=True)
        ],
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=offset)) if texts else [],
    }


def _finite(value: float) -> float:
    """JSON has no infinity. -9999 stands for it, as in vLLM."""
    return max(value, -9999.0)
