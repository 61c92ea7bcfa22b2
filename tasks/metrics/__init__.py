"""Metrics of predictions: functions of (targets, predictions) that use established libraries."""
