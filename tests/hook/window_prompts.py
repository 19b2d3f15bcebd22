"""Prompts of the windows that are measured."""


def prompt(index: int, length: int) -> list[int]:
    """Token ids of one request: nothing that a model was trained on, the same every time."""
    return [(7 * index + 13 * place) % 2500 + 300 for place in range(length)]
