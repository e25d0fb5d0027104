"""The keeper: a small process per host that holds memory which outlives ranks, attempts and steps.

`place` says where its socket is, `protocol` what is said on it, `server` is the process, `client` the other end.
Standard library alone: the keeper imports no torch, opens no GPU, and never maps what it holds.
"""
