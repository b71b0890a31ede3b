"""Results → table, JSON, CSV, text; knows results only."""
