"""Rollout: sampling rules, jitted prefill and group decode, shape buckets, and the engine over them.

A prompt is prefilled once and its G responses are decoded against that one set of keys and values. What a
request samples depends on (seed, step, request id, sample index, token index) and on nothing else.
"""
