"""Runs cases as jobs of the scheduler of many machines, as ``--gpu-executor`` asks; nothing of this is imported without it.

    Order -> scheduler (slurm, ray) -> job: the very code of a local run -> Delivery -> the Reply, and the Host it is of

pytest stays where it was started and does what it always does; only where a case's processes run is another place.
"""
