"""One file per environment, imported as `asyncrl.envs`."""

if __name__ != "asyncrl.envs":
    raise ImportError(f"import this package as 'asyncrl.envs', not as {__name__!r}: a short name would shadow yours")
