"""OpenAI's HTTP API in front of an engine process. Needs the extra `serve`."""
