"""A package beside weft that adds to it: a file for each thing that it adds."""
