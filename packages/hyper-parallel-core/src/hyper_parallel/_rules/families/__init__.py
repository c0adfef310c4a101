"""Rules for whole families of operators, which op tables name."""
