"""One file an op: public function, reference, backward formula, registration."""
