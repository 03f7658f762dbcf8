"""One engine of steps: many jobs share the steps of one model, such as pictures, films and windows of sound. No torch.

loop     jobs, workers, and the members of a step; a job that fails fails alone
orders   of drawings: clients share the model evenly, with a stated bound; of sound: the listener with the least left to hear is first
session  above the loop: a job and its reader, who gets the pieces of a product
"""
