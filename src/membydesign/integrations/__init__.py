"""What other libraries' models can use of this one."""
