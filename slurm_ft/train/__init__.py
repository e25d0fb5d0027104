"""What runs inside a rank. Imports nothing of the controller's side, and no torch by itself."""
