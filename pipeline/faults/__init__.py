"""Fault injection: kills builds and audits the caches they leave."""
