"""Jobs as other launchers take them: a torchrun script, an sbatch file, Kubernetes manifests.

Pure functions from a ``Job`` to text; nothing is started and no torch imported.
"""

from __future__ import annotations

from mcp_parallel.launch.jobs.job import Job
from mcp_parallel.launch.jobs.pytorchjob import pytorchjob
from mcp_parallel.launch.jobs.slurm import sbatch
from mcp_parallel.launch.jobs.torchrun import torchrun
from mcp_parallel.launch.jobs.trainjob import trainjob

RENDERERS = {
    "torchrun": torchrun,
    "slurm": sbatch,
    "kubernetes-trainer": trainjob,
    "kubernetes-pytorchjob": pytorchjob,
}
"""Kind -> function that gives its text."""

__all__ = ["RENDERERS", "Job"]
