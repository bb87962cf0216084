"""How the model is spread over ranks: mesh, tensor, pipeline and data parallelism."""
