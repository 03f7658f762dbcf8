"""The files of the default picture model of omnistage, in the folder `coloured-shapes`. No code."""
