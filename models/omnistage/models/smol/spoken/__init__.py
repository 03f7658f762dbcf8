"""What is written, in words that are spoken.

A text is read once, from left to right. Where a written form begins (a number, a date, a price, a sign, an address ...) its function says
its words, and nothing reads those words again; what is between forms stays as it is. A new form is a pattern and a function in the file of
its kind; `reader.py` has the order in which they are tried.
"""
