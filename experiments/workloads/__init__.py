"""What the runner trains: models of `ssd.modules`, each with presets and data, by name."""

from .registry import Preset, Workload, get_workload, preset_names, workload_names

__all__ = ["Preset", "Workload", "get_workload", "preset_names", "workload_names"]
