"""How much memory a model would take, without loading it.

skeleton.py a model without weights, headers.py what files say of themselves, activations.py and trace.py what
a forward keeps, reserve.py what inference needs beside the weights, bill.py what training adds up to.
"""
