"""Readers of a run: status, report, the live view. They read the run folder and never write to it."""
