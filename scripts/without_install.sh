# Source this from the repository root to use asyncrl where nothing can be installed: `algos/` and `envs/` are folders at
# the root that import as asyncrl.algos and asyncrl.envs, so a folder of links is put on the path. Then leave the root
# (`cd "$ASYNCRL_LINKS"`): Python would otherwise find the bare `asyncrl` folder in the current directory first.
export ASYNCRL_ROOT="$PWD" ASYNCRL_LINKS="${TMPDIR:-/tmp}/asyncrl-links"
mkdir -p "$ASYNCRL_LINKS/asyncrl"
ln -sfn "$ASYNCRL_ROOT"/asyncrl/* "$ASYNCRL_LINKS/asyncrl/"
ln -sfn "$ASYNCRL_ROOT/algos" "$ASYNCRL_LINKS/asyncrl/algos"
ln -sfn "$ASYNCRL_ROOT/envs" "$ASYNCRL_LINKS/asyncrl/envs"
export PYTHONPATH="$ASYNCRL_LINKS${PYTHONPATH:+:$PYTHONPATH}"
