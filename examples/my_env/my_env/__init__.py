"""An example of a package with environments for asyncrl."""
