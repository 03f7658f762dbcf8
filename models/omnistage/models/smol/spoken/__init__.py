"""Turns written text into spoken words.

A text is read once, from left to right. Where a written form begins (a number, a date, a price, a sign, an address ...), its function gives
its words, and nothing reads those words again; text between forms stays as it is. A new form is a pattern and a function in the file of its
kind; `reader.py` has the order in which forms are tried.
"""
