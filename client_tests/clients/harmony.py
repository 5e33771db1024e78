"""openai-harmony: the messages that answers of gpt-oss are, one JSON text per line of the input.

It would download the vocabulary o200k_base. The package bpe-openai has the same file.
"""

import gzip
import json
import os
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    packed = files("bpe_openai").joinpath("data/o200k_base.tiktoken.gz").read_bytes()
    (Path(folder) / "o200k_base.tiktoken").write_bytes(gzip.decompress(packed))
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
    import openai_harmony

    encoding = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
found = []
for line in sys.stdin:
    ids = encoding.encode(json.loads(line), allowed_special="all")
    messages = encoding.parse_messages_from_completion_tokens(ids, openai_harmony.Role.ASSISTANT)
    found.append([message.to_dict() for message in messages])
print(json.dumps(found))
