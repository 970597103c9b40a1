"""Real components that the tests stand on; `tests/conftest.py` has a fixture for each.

`s3` and `toxiproxy`: an object store, and a link to it that fails on command. `control_plane` with `scripted_nodes`: a
Kubernetes whose pods do what the test says, by the hundreds. `node`: one real node, for containers that really run, with
`images` to build them. `kueue`: quotas. `tools`: builds the programs behind all of these, once per version.
"""
