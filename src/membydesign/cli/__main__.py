"""`python -m membydesign.cli` is `mbd`; so `accelerate launch --module membydesign.cli …` starts many of them."""

from membydesign.cli import main

if __name__ == "__main__":
    main()
