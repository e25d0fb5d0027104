"""The recovery benchmark: one trainer, many ways to keep it alive. See scripts/bench/recovery."""
