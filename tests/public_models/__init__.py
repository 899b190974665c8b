"""Three public programs, written anew with their class and parameter names and their arithmetic, slips included."""
