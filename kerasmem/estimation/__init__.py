"""How much memory will training need?"""
