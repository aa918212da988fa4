import typer

from tools.faults import command

if __name__ == "__main__":
    typer.run(command)
