"""Words of command lines that tests put together from usual ones and changes to them."""

_REPEATED = ("--corpus", "--filter", "--gin_file", "--gin_param", "--axis")


def changed(*words: object) -> list[str]:
    """Returns the words; of two "--name=value" with one name, only the last.

    A command itself refuses a flag that is given two values.
    """
    texts = [str(word) for word in words]
    last = {_name(word): place for place, word in enumerate(texts)}
    return [
        word
        for place, word in enumerate(texts)
        if last[_name(word)] == place
        or not word.startswith("--")
        or "=" not in word
        or _name(word) in _REPEATED
    ]


def _name(word: str) -> str:
    return "--" + word.partition("=")[0].removeprefix("--").replace("-", "_")
