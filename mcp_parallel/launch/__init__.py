"""Starting ranks on this machine or as part of a torchrun job, and watching over them."""
