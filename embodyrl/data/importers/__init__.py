"""Other people's demonstrations, written as LeRobot data sets: HDF5 files and RLDS."""
