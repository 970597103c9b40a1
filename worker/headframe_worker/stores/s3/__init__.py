"""A bucket as a store. `store.py` is the store; every other module here is one idea it is made of."""
