"""Samples token ids from logits, row by row, without sorting the vocabulary.

Batch-invariant: a row's result depends only on that row. No reduction is used that torch may split
differently for more rows, and every row decides by itself whether it needs a wider search.

Every filter (top-k, top-p, min-p) is one threshold on the row's scaled logits, and tokens equal to
the threshold stay, so ties do not depend on the order of a selection algorithm. Of the tokens that
stay, one is drawn by an exponential race (`exponentials`). Knows nothing of requests, seeds or
counts. Specifies `cpu/sampling.py`.

Legend: R rows, V vocabulary, N edits, C candidates, K of the top.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from remora.kernels.dispatch import by_triton
from remora.kernels.grammar_mask import mask_tokens as mask_tokens

# Width of the blocks of a row: a two-level search reads the vocabulary once and vectorises (argmax
# over 8 x 49152 takes a tenth of torch's time).
BLOCK = 128
# Candidates of a truncated row: 64, then 8 times as many until they suffice.
FIRST_CANDIDATES, GROWTH = 64, 8
NUMBERS_AT_ONCE = 2**17  # of a race, so that they stay in a cache
NO_FAULT, NOT_FINITE, ALL_BANNED = 0, 1, 2  # of a row, as `device_sampling.py` tells them


def greedy(logits: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the id of each row's greatest logit [R], the lowest among equals.

    Also return whether the row is good [R]: it has no NaN or infinity, and not only -inf. The id of
    a row that is not good is undefined.
    """
    best, ids = argmax(logits)
    return ids.cpu().numpy(), best.isfinite().cpu().numpy()


def choose(
    logits: Tensor,
    temperature: npt.NDArray[np.float32],
    keys: npt.NDArray[np.int64],
    *,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Sample one id per row [R]: the greatest logit's, or a draw from the filtered tokens.

    logits:       [R, V] float32; may be overwritten
    temperature:  [R]; 0 = greedy (the lowest id among equals), else at least 1e-5
    keys:         [R] 64 random bits; not read for greedy rows
    others:       [R] as in `draw_truncated`; top_p 1 and min_p 0 = off

    Also return whether the row is good [R], as `greedy` does.
    """
    token_ids, is_good = greedy(logits)
    is_random = is_good & (temperature > 0)
    is_cut = (top_k > 0) | (top_p < 1) | (min_p > 0)
    filters = (top_k, top_p, min_p)
    for chosen, used in ((is_random & is_cut, filters), (is_random & ~is_cut, ())):
        here = chosen.nonzero()[0]
        if not len(here):
            continue
        numbers = (torch.from_numpy(each[here]) for each in (temperature, keys, *used))
        some = _take(logits, torch.from_numpy(here).to(logits.device))
        heat, bits, *rest = (each.to(logits.device) for each in numbers)
        if rest:
            ids = draw_truncated(some, heat, bits, top_k=rest[0], top_p=rest[1], min_p=rest[2])
        else:
            ids = draw(some, heat, bits)
        token_ids[here] = ids.cpu().numpy()
    return token_ids, is_good


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's greatest logit [R] and its id [R]; the lowest id among equals.

    The value is NaN if the row holds a NaN; the id is then undefined.
    """
    blocks = _in_blocks(logits, fill=-torch.inf)
    values, block = blocks.amax(2).max(1)
    rows = torch.arange(len(logits), device=logits.device)
    return values, block * BLOCK + blocks[rows, block].argmax(1)


def add_at(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add values [N] to logits[rows, ids], in place. A (row, id) pair occurs at most once.

    Adding -inf bans a token and keeps a NaN detectable. The kernel of `gpu/logit_edits.py` skips
    entries with a row below 0.
    """
    if by_triton(logits.device):
        from remora.kernels.gpu import logit_edits

        logit_edits.add_at(logits, rows, ids, values)
    else:
        logits[rows, ids] += values


def penalize(
    logits: Tensor,
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    *,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Penalise occurred tokens, in place; all arguments but `logits` are [N].

    rows, ids:   one entry for each distinct token of a row's prompt and output
    counts:      occurrences in the output only
    repetition:  positive logits are divided by it, the others multiplied
    presence:    subtracted once if the output holds the token
    frequency:   subtracted once per occurrence in the output

    The kernel of `gpu/logit_edits.py` skips entries with a row below 0.
    """
    if by_triton(logits.device):
        from remora.kernels.gpu import logit_edits

        logit_edits.penalize(
            logits,
            rows,
            ids,
            counts,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )
        return
    old = logits[rows, ids]
    new = torch.where(old > 0, old / repetition, old * repetition)
    logits[rows, ids] = new - presence * (counts > 0) - frequency * counts


def exponentials(keys: Tensor, ids: Tensor) -> Tensor:
    """Return an exponentially distributed number [R, C] float32 for each row's key and each id.

    The id whose number, divided by its weight, is least is drawn with a probability proportional to
    its weight. Two distributions that are alike mostly draw the same id with the same key: a draft
    model that is nearly right is mostly right (Daliri, Musco and Suresh, "Coupling without
    communication and drafter-invariant speculative decoding", 2024).

    keys:  [R] int64, 64 random bits
    ids:   [R, C] or [C] int64, below 2^31

    The bits are hashed with each half of the key in turn (finaliser of MurmurHash3); 31 of them are
    a fraction f, and -log(1 - f) is the number: precise where it is small, which decides.
    """
    low, high = (keys << 32 >> 32).int()[:, None], (keys >> 32).int()[:, None]
    bits = ids.int() * (0x9E3779B1 - 2**32) + low
    _mix_words(_mix_words(bits).bitwise_xor_(high))
    fractions = _shifted(bits, 1).float().add_(0.5).mul_(2.0**-31)
    return fractions.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _mix_words(x: Tensor) -> Tensor:
    """Mix words of 32 bits, held as int32, in place; products wrap."""
    x.bitwise_xor_(_shifted(x, 16)).mul_(0x85EBCA6B - 2**32)
    x.bitwise_xor_(_shifted(x, 13)).mul_(0xC2B2AE35 - 2**32)
    return x.bitwise_xor_(_shifted(x, 16))


def _shifted(x: Tensor, count: int) -> Tensor:
    """Shift words of 32 bits, held as int32, to the right."""
    return (x >> count).bitwise_and_((1 << 32 - count) - 1)


def draw(logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """Draw one id [R] per row from softmax(logits / temperature).

    logits:       [R, V] float32 with a finite maximum; overwritten
    temperature:  [R], at least 1e-5
    keys:         [R] int64, 64 random bits
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    together = max(1, NUMBERS_AT_ONCE // logits.shape[1])
    drawn = [
        _race(rows.div_(heat[:, None]).softmax(1), ids, some)
        for rows, heat, some in zip(
            *(torch.split(each, together) for each in (logits, temperature, keys)), strict=True
        )
    ]
    return torch.cat(drawn)


def draw_truncated(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    *,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Draw one id [R] per row after top-k, then top-p, then min-p filtering.

    As `draw`, and:
    top_k:  [R] int64; the k greatest, equals of the last included; 0 = all
    top_p:  [R] float64; of those, the smallest set of likeliest ones with this share of their mass
    min_p:  [R]; of those, tokens at least this fraction as probable as the most probable
    """
    scaled = logits.div_(temperature[:, None])
    vocab_size = scaled.shape[1]
    mass = _row_mass(scaled, is_needed=(top_k == 0) & (top_p < 1))
    token_ids = torch.zeros(len(scaled), dtype=torch.int64, device=scaled.device)
    is_pending = torch.ones(len(scaled), dtype=torch.bool, device=scaled.device)
    size = 0
    while size < vocab_size and bool(is_pending.any()):
        size = min(size * GROWTH or FIRST_CANDIDATES, vocab_size)
        fits = is_pending & ((top_k < size) | (size == vocab_size))
        here = fits.nonzero().squeeze(1)
        if not len(here):
            continue
        values, ids = _top_values(_take(scaled, here), size)
        threshold, is_final = _threshold(
            values, mass[here], top_k[here], top_p[here], min_p[here], is_all=size == vocab_size
        )
        # The draw of a row that is not final is overwritten in its next, wider round.
        token_ids[here] = _race_above(values, ids, threshold, keys[here])
        is_pending[here] = ~is_final
    return token_ids


def token_logprobs(
    logits: Tensor, token_ids: npt.NDArray[np.int64], num_top: int
) -> tuple[
    npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.float32]
]:
    """Return log-probabilities of the chosen tokens and of the likeliest ones.

    Returns the tokens' log-probabilities [R] and ranks [R] (1 = no logit is greater), and the ids
    and log-probabilities [R, K] of the K = min(num_top, V) likeliest, lower ids first among equals.
    """
    logprobs = logits.log_softmax(1)
    index = torch.from_numpy(token_ids).to(logits.device)[:, None]
    ranks = (logits > logits.gather(1, index)).count_nonzero(1) + 1
    top_ids = _top_ids(logits, min(num_top, logits.shape[1]))
    return (
        logprobs.gather(1, index).squeeze(1).cpu().numpy(),
        ranks.to(torch.int32).cpu().numpy(),
        top_ids.cpu().numpy(),
        logprobs.gather(1, top_ids).cpu().numpy(),
    )


def _in_blocks(rows: Tensor, *, fill: float) -> Tensor:
    """View [R, V] as [R, blocks, BLOCK]; other vocabularies are copied and padded."""
    missing = -rows.shape[1] % BLOCK
    padded = F.pad(rows, (0, missing), value=fill) if missing else rows
    return padded.reshape(len(padded), padded.shape[1] // BLOCK, BLOCK)


def _take(tensor: Tensor, index: Tensor) -> Tensor:
    """Select rows by ascending distinct `index`, without a copy if it selects all."""
    return tensor if len(index) == len(tensor) else tensor[index]


def _race(weights: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """Return the place [R] of the weight in [R, C] whose id wins the race."""
    times = exponentials(keys, ids).div_(weights)
    return argmax(times.neg_())[1]


def _race_above(values: Tensor, ids: Tensor, threshold: Tensor, keys: Tensor) -> Tensor:
    """Draw one of the candidates [R, C] that reach the threshold [R, 1]."""
    weights = (values - values[:, :1]).exp()
    weights = torch.where(values >= threshold, weights, 0.0)
    return ids.gather(1, _race(weights, ids, keys)[:, None]).squeeze(1)


def _row_mass(scaled: Tensor, *, is_needed: Tensor) -> Tensor:
    """Sum exp(logit - greatest logit) over each row [R] float64; 1 where it is not needed."""
    mass = torch.ones(len(scaled), dtype=torch.float64, device=scaled.device)
    here = is_needed.nonzero().squeeze(1)
    if len(here):
        # The greatest token's probability is exp(0) / mass; softmax works row by row, a plain
        # sum of one long row is split over threads and would differ from that of many rows.
        mass[here] = 1.0 / _take(scaled, here).softmax(1).amax(1).double()
    return mass


def _top_values(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` greatest values [R, size] of each row, descending, and their indices.

    The choice among equals of the last one is undefined.
    """
    blocks = _in_blocks(rows, fill=-torch.inf)
    if blocks.shape[1] <= 2 * size:
        values, places = rows.topk(size, 1)
        return values, places
    # A value among the greatest `size` lies in one of the `size` blocks with the greatest maxima.
    best = blocks.amax(2).topk(size, 1, sorted=False).indices
    inside = blocks.gather(1, best[:, :, None].expand(-1, -1, BLOCK))
    values, at = inside.flatten(1).topk(size, 1)
    return values, best.gather(1, at // BLOCK) * BLOCK + at % BLOCK


def _threshold(
    values: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, is_all: bool
) -> tuple[Tensor, Tensor]:
    """Return the least logit [R, 1] that all filters keep, and whether it is final [R].

    values: [R, C] the row's greatest scaled logits, descending; `is_all`: C is the vocabulary
    mass:   [R] of the whole row, from `_row_mass`; read for top-p without top-k

    It is not final if tokens beyond the candidates could reach it or add to the mass.
    """
    size = values.shape[1]
    last = values[:, -1:]
    has_k = (top_k > 0)[:, None]
    kth = values.gather(1, (top_k.clamp(1, size) - 1)[:, None])
    kth = torch.where(has_k, kth, -torch.inf)

    weights = (values - values[:, :1]).double().exp()
    running = torch.where(values >= kth, weights, 0.0).cumsum(1)
    total = torch.where(has_k, running[:, -1:], mass[:, None])
    num_short = (running < top_p[:, None] * total).sum(1, keepdim=True)
    nucleus = values.gather(1, num_short.clamp(max=size - 1))
    is_nucleus = (top_p < 1)[:, None] & (num_short < size)
    nucleus = torch.where(is_nucleus, nucleus, -torch.inf)

    threshold = torch.maximum(torch.maximum(kth, nucleus), values[:, :1] + min_p[:, None].log())
    is_inside = (threshold > last) & (~has_k | (kth > last))
    is_final = is_inside | (last == -torch.inf) | is_all
    return threshold, is_final.squeeze(1)


def _top_ids(values: Tensor, num_top: int) -> Tensor:
    """Return the ids [R, num_top] of the greatest values, falling, lower ids first among equals."""
    if num_top == 0:
        return torch.empty((len(values), 0), dtype=torch.int64, device=values.device)
    top, ids = _top_values(values, num_top)
    num_reaching = (values >= top[:, -1:]).count_nonzero(1)
    for row in (num_reaching > num_top).nonzero().squeeze(1).tolist():
        # More tokens equal the last value than there are places: keep the lowest ids.
        candidates = (values[row] >= top[row, -1]).nonzero().squeeze(1)
        order = values[row, candidates].argsort(descending=True, stable=True)
        ids[row] = candidates[order[:num_top]]
    ids = ids.sort(1).values
    order = values.gather(1, ids).argsort(dim=1, descending=True, stable=True)
    return ids.gather(1, order)
