"""Metrics of predictions: functions of (targets, predictions), by well-kept libraries."""
