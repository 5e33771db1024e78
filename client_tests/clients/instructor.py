"""Instructor: an object by a tool. Its validation fails once, so the call and the error are sent back."""

import json
import sys
from typing import Literal

# This file has the name of the package, and its folder comes first where it is imported without -I.
import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, field_validator

seen = []


class Trip(BaseModel):
    model_config = ConfigDict(extra="forbid")
    days: Literal[1, 2, 3]

    @field_validator("days")
    @classmethod
    def _second(cls, days: int) -> int:
        seen.append(days)
        if len(seen) % 2:
            raise ValueError("take the other number of days")
        return days


answers = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0), mode=mode)
    trip, completion = client.chat.completions.create_with_completion(
        model="tiny",
        response_model=Trip,
        messages=[{"role": "user", "content": "A trip"}],
        max_retries=1,
        max_tokens=100,
        temperature=0,
    )
    answers[mode.name] = {"trip": trip.model_dump(), "prompt": completion.usage.prompt_tokens}
print(json.dumps(answers | {"tries": len(seen)}))
