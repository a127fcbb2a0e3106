"""Rows in, moments out; from moments the exact least-squares map and every score of it.

Which rows are held out, and the choice of hidden units in closed form, are here too.
Needs torch. Knows no models: rows come from anywhere.
"""
