"""Making quantized weights, to be read: three ways to choose the codes of a matrix, and the pass that feeds them."""
