"""How a prepared folder is made: tokens staged part by part, split, cut into rows, published whole."""
