"""Turns written text into spoken words.

A text is read once, from left to right. Where a written form begins (a number, a date, a price, a sign, an address ...), the first rule of
tables/rules.tsv that fits gives its words, and nothing reads those words again; text between forms stays as it is. A new form is a row of
that table.
"""
