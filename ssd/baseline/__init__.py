"""The baseline: the stages of the Mamba-2 paper, a kernel each, five forward and nine backward (and one for a gate)."""
