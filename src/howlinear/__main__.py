"""`python -m howlinear` is the command too."""

from howlinear.cli.app import main

if __name__ == "__main__":
    main()
