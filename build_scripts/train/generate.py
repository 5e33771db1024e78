"""The target with a cache: answers to many prompts at once, and the plain loop that measures the pair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from build_scripts.corpus.corpus import Example
from build_scripts.train.data import Render
from build_scripts.train.export import END, END_OF_TEXT, MASK
from build_scripts.train.model import Drafter, Shape, Target, rotary, rotate


class Cache:
    """Keys and values of every layer, [B, kv heads, capacity, head_dim]; rows of a batch are at the same position."""

    def __init__(self, shape: Shape, batch: int, capacity: int, device: torch.device) -> None:
        size = (shape.target_layers, batch, shape.num_key_value_heads, capacity, shape.head_dim)
        self.keys, self.values = torch.zeros(size, device=device), torch.zeros(size, device=device)

    def keep(self, rows: Tensor) -> None:
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


def target_pass(
    target: Target, tokens: Tensor, start: int, cache: Cache, padding: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normed hidden rows [B, S, D] and features [B, S, taps * D] of tokens [B, S] at positions start, start + 1, ...

    The first padding[b] positions of row b hold nothing and are not looked at. That the others are then shifted
    changes nothing: rotary attention knows only differences of positions.
    """
    shape = target.shape
    batch, length = tokens.shape
    end = start + length
    positions = torch.arange(start, end, device=tokens.device)
    cos, sin = rotary(positions, shape)
    columns = torch.arange(end, device=tokens.device)
    unseen = (columns > positions[:, None])[None]
    if padding is not None:
        unseen = unseen | ((columns < padding[:, None, None]) & (columns != positions[:, None]))
    groups = shape.num_attention_heads // shape.num_key_value_heads
    x = target.embed_tokens(tokens)
    taps = []
    for index, layer in enumerate(target.layers):
        attention = layer.self_attn
        normed = layer.input_layernorm(x)
        cache.keys[index][:, :, start:end], cache.values[index][:, :, start:end] = attention.keys_values(
            normed, cos, sin
        )
        q = rotate(attention.q_norm(attention.heads(attention.q_proj(normed))), cos, sin)
        q = (
            q.reshape(batch, shape.num_key_value_heads, groups * length, shape.head_dim)
            * shape.head_dim**-0.5
        )
        scores = q @ cache.keys[index][:, :, :end].mT
        scores.masked_fill_(unseen.repeat(1, groups, 1)[:, None], float("-inf"))
        mixed = attention.weights(scores, positions) @ cache.values[index][:, :, :end]
        mixed = mixed.view(batch, shape.num_attention_heads, length, shape.head_dim)
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if index in shape.target_layer_ids:
            taps.append(x)
    return target.norm(x), torch.cat(taps, -1)


@dataclass(frozen=True, slots=True)
class Response:
    """A prompt with its answer: tokens, how many are the prompt, and the features of every token but the last."""

    tokens: list[int]
    prompt_length: int
    features: Tensor


@torch.inference_mode()
def respond(
    target: Target, prompts: list[list[int]], temperatures: list[float], limit: int, seed: int
) -> Iterator[Response]:
    """Answers to prompts of similar lengths, decoded together; temperature 0 is greedy.

    limit is the longest prompt with its answer; answers that do not end by then are dropped.
    """
    device = target.norm.weight.device
    noise = torch.Generator(device).manual_seed(seed)
    length = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor(
        [[END_OF_TEXT] * (length - len(prompt)) + prompt for prompt in prompts], device=device
    )
    padding = torch.tensor([length - len(prompt) for prompt in prompts], device=device)
    heat = torch.tensor(temperatures, device=device)[:, None]
    cache = Cache(target.shape, len(prompts), limit, device)
    features = torch.zeros(len(prompts), limit, target.fan_in, dtype=torch.bfloat16, device=device)
    position, fed = 0, tokens
    while len(tokens) and position + fed.shape[1] < limit:
        hidden, tapped = target_pass(target, fed, position, cache, padding)
        features[:, position : position + fed.shape[1]] = tapped
        position += fed.shape[1]
        logits = target.head(hidden[:, -1])
        uniform = torch.rand(logits.shape, generator=noise, device=device)
        fed = (logits - heat * (-(uniform + 1e-10).log()).log()).argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, fed), 1)
        ended = (fed == END) | (fed == END_OF_TEXT)
        if ended.any():
            for row in ended.squeeze(1).nonzero().flatten().tolist():
                first = int(padding[row])
                taps = features[row, first:position].cpu().clone()
                yield Response(tokens[row, first:].tolist(), length - first, taps)
            rest = (~ended).squeeze(1).nonzero().flatten()
            tokens, heat, fed = tokens[rest], heat[rest], fed[rest]
            padding, features = padding[rest], features[rest]
            cache.keep(rest)


@torch.inference_mode()
def propose(target: Target, drafter: Drafter, features: Tensor, anchor: int) -> list[int]:
    """The drafted tokens after `anchor`, from the features [n, taps * D] of the n tokens before it."""
    size, known = drafter.shape.block_size, len(features)
    block = torch.tensor([[anchor] + [MASK] * (size - 1)], device=features.device)
    positions = torch.arange(known + size, device=features.device)[None]
    mask = torch.ones(1, 1, size, known + size, dtype=torch.bool, device=features.device)
    rows = drafter(
        features[None], positions[:, :known], target.embed_tokens(block), positions[:, known:], mask
    )
    return target.head(rows[0, 1:]).argmax(-1).tolist()


@torch.inference_mode()
def speculate(target: Target, drafter: Drafter, prompt: list[int], limit: int) -> tuple[list[int], int]:
    """The greedy answer to a prompt, decoded with drafts, and the number of rounds after the first token."""
    device = target.norm.weight.device
    cache = Cache(target.shape, 1, limit + drafter.shape.block_size, device)
    hidden, features = target_pass(target, torch.tensor([prompt], device=device), 0, cache)
    features = features[0]
    tokens = [*prompt, int(target.head(hidden[0, -1]).argmax())]
    rounds = 0
    while tokens[-1] not in (END, END_OF_TEXT) and len(tokens) < limit:
        drafted = propose(target, drafter, features, tokens[-1])
        block = torch.tensor([[tokens[-1], *drafted]], device=device)
        hidden, new = target_pass(target, block, len(tokens) - 1, cache)
        chosen = target.head(hidden[0]).argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == chosen[accepted]:
            accepted += 1
        committed = chosen[: accepted + 1]
        if END in committed:
            committed = committed[: committed.index(END) + 1]
        tokens += committed
        features = torch.cat((features, new[0, : accepted + 1]))
        rounds += 1
    return tokens[len(prompt) :], rounds


def measure(
    target: Target, drafter: Drafter, tokenizer: Tokenizer, asked: list[Example], render: Render
) -> dict[str, float]:
    """Mean acceptance length (tokens per round) over the prompts, and the share answered exactly as the corpus does."""
    tokens = rounds = right = ended = 0
    for example in asked:
        answer, used = speculate(target, drafter, tokenizer.encode(render(example)[0]).ids, 512)
        tokens += len(answer) - 1
        rounds += used
        ended += answer[-1] == END
        right += tokenizer.decode(answer) == example.answer
    count = len(asked)
    return {
        "mean_acceptance_length": round(tokens / max(1, rounds), 2),
        "answer_tokens": round(tokens / count),
        "ended": round(ended / count, 3),
        "as_in_corpus": round(right / count, 3),
    }


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1e-6)
