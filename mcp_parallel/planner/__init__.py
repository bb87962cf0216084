"""Which layout trains a model fastest on given hardware, from arithmetic alone. No torch."""
