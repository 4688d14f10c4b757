"""The equations of RS-GRPO written in torch, float64 and with plain loops, for the tests.

Written from the formulae alone; shares no code with the package. Masks are 0/1 tensors.
"""

import math

import torch

EPS = 1e-6


def tensor(values):
    """Any array as a float64 tensor."""
    return torch.tensor(values.tolist(), dtype=torch.float64)


def normalise(values):
    """(v - mean) / (std_{n-1} + 1e-6) of a 1-D tensor; zeros for fewer than two or equal values."""
    if len(values) < 2 or values.max() == values.min():
        return torch.zeros_like(values)
    mean = values.sum() / len(values)
    std = math.sqrt(float(((values - mean) ** 2).sum()) / (len(values) - 1))
    return (values - mean) / (std + EPS)


def channel_advantages(rewards, valid):
    """[P, G, C]: each channel of each group on its own."""
    out = torch.zeros_like(rewards)
    for p in range(len(rewards)):
        members = [g for g in range(rewards.shape[1]) if valid[p, g]]
        for c in range(rewards.shape[2]):
            out[p, members, c] = normalise(rewards[p, members, c])
    return out


def token_advantages(rewards, masks, valid, align):
    """[P, G, T] by eq. 7-9: rewards [P, G, 3], masks [P, G, 3, T]."""
    prompts, group, _, length = masks.shape
    out = torch.zeros(prompts, group, length, dtype=torch.float64)

    def scope(p, g, t):
        if not (valid[p, g] and masks[p, g, 2, t]):
            return None
        if masks[p, g, 1, t]:
            return "derivation"
        return "perception" if masks[p, g, 0, t] else "rest"

    def mean_reward(p, g, name):
        channels = {"perception": (0, 2), "derivation": (1, 2), "rest": (2,)}[name]
        return sum(float(rewards[p, g, c]) for c in channels) / len(channels)

    for p in range(prompts):
        if align == "index":
            for t in range(length):
                members = [g for g in range(group) if scope(p, g, t)]
                values = [mean_reward(p, g, scope(p, g, t)) for g in members]
                for g, value in zip(members, normalise(tensor_of(values)), strict=True):
                    out[p, g, t] = value
            continue
        for name in ("perception", "derivation", "rest"):
            members = [g for g in range(group) if name in [scope(p, g, t) for t in range(length)]]
            values = [mean_reward(p, g, name) for g in members]
            for g, value in zip(members, normalise(tensor_of(values)), strict=True):
                for t in range(length):
                    if scope(p, g, t) == name:
                        out[p, g, t] = value
    return out


def tensor_of(values):
    """A list of numbers as a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def clipped_terms(logp, old, adv, mask, low, high, dual):
    """Per-token loss [G, C, T]: max(-A r, -A r_clipped), for A < 0 at most -A c."""
    d = (logp - old).clamp(-20, 20)
    ratio = d.exp()[:, None]
    bounded = d.clamp(math.log(1 - low), math.log(1 + high)).exp()[:, None]
    a = adv * mask
    loss = torch.maximum(-a * ratio, -a * bounded)
    if dual is not None:
        loss = torch.where(a < 0, torch.minimum(loss, -a * dual), loss)
    return loss


def batch_loss(logp, old, adv, mask, *, low=0.2, high=0.28, dual=None, average="token_batch"):
    """[C] channel losses of a batch [P, G, ...]: one token mean, or the mean of groups' means."""
    prompts = range(len(logp))
    terms = [clipped_terms(logp[p], old[p], adv[p], mask[p], low, high, dual) for p in prompts]
    sums = torch.stack([(terms[p] * mask[p]).sum((0, 2)) for p in prompts])
    counts = mask.sum((1, 3))
    if average == "token_batch":
        return sums.sum(0) / counts.sum(0).clamp(min=1)
    means = sums / counts.clamp(min=1)
    return means.sum(0) / (counts > 0).sum(0).clamp(min=1)


def kl(x, y, kind):
    """Token penalties of policy log-probs x against reference log-probs y."""
    if kind == "kl":
        return x - y
    if kind == "abs":
        return (x - y).abs()
    if kind == "mse":
        return (x - y) ** 2 / 2
    if kind == "full":
        return (x.exp() * (x - y)).sum(-1)
    d = (y - x).clamp(-20, 20)
    return (d.exp() - d - 1).clamp(-10, 10)
