"""The controller's side of a run: what keeps replicas alive."""
