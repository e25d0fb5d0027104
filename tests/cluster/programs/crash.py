"""Fails always, in the same way."""


def load(path: str) -> None:
    raise FileNotFoundError(f"no such data set: {path}")


load("tokens.bin")
