"""One engine of steps: many jobs share the steps of one model, such as pictures, films and windows of sound. No torch.

loop       jobs, workers, who is in a step; a job that fails fails alone
fair       who steps next: clients share the model evenly, with a stated bound
listeners  who steps next: whoever has least left to hear
session    above the loop: a job and its reader, who is given pieces
"""
