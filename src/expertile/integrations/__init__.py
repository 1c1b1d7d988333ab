"""expertile behind other libraries' interfaces. Each module imports its library only when it is asked to register."""
