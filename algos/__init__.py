"""One file per algorithm, imported as `asyncrl.algos`."""

if __name__ != "asyncrl.algos":
    raise ImportError(f"import this package as 'asyncrl.algos', not as {__name__!r}: a short name would shadow yours")
