"""The files of the default picture model of omnistage, in the folder `model`. No code."""
