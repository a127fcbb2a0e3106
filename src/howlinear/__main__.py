"""`python -m howlinear` is the command too."""

from howlinear.cli import main

if __name__ == "__main__":
    main()
